(function(){
  var data=JSON.parse(document.getElementById('atlas').textContent),nets=data.networks,chosen=nets.length?0:-1,W,H,PAD=46;
  for(var k=0;k<nets.length;k++)if(nets[k].placed)chosen=k;
  var families=[],kinds=['image','signal','tabular','coordinates','tokens'];
  nets.forEach(function(n){if(families.indexOf(n.family)<0)families.push(n.family)});
  function el(name,attributes,text){var e=document.createElementNS('http://www.w3.org/2000/svg',name);
    for(var key in attributes)e.setAttribute(key,attributes[key]);if(text!==undefined)e.textContent=text;return e}
  function colour(n){return n.placed?'var(--ink)':'var(--c'+families.indexOf(n.family)%7+')'}
  function shape(kind,x,y,r){ // circle, square, triangle, diamond, cross
    var i=kinds.indexOf(kind);
    if(i===0)return el('circle',{cx:x,cy:y,r:r});
    if(i===1)return el('rect',{x:x-r*.9,y:y-r*.9,width:r*1.8,height:r*1.8});
    var d=i===2?[[0,-1.2],[1.15,.85],[-1.15,.85]]:i===3?[[0,-1.3],[1.3,0],[0,1.3],[-1.3,0]]:
      [[-.4,-1.2],[.4,-1.2],[.4,-.4],[1.2,-.4],[1.2,.4],[.4,.4],[.4,1.2],[-.4,1.2],[-.4,.4],[-1.2,.4],[-1.2,-.4],[-.4,-.4]];
    return el('polygon',{points:d.map(function(p){return (x+p[0]*r)+','+(y+p[1]*r)}).join(' ')})}
  var select=document.getElementById('aspect'),find=document.getElementById('find');
  function draw(){
    var map=data.maps[select.value],box=document.getElementById('map'),points=map.points,seen=points.filter(Boolean);
    W=Math.max(330,Math.min(900,box.clientWidth));H=Math.max(430,W*.69); // one unit is one pixel: names stay readable
    var xs=seen.map(function(p){return p[0]}),ys=seen.map(function(p){return p[1]});
    var x0=Math.min.apply(0,xs),x1=Math.max.apply(0,xs),y0=Math.min.apply(0,ys),y1=Math.max.apply(0,ys);
    var s=Math.min((W-2*PAD-60)/(x1-x0||1),(H-2*PAD-(W<600?100:60))/(y1-y0||1)); // one scale: distances are seen as they are
    function X(p){return W/2-30+(p[0]-(x0+x1)/2)*s}function Y(p){return H/2+(W<600?50:30)-(p[1]-(y0+y1)/2)*s}
    var svg=el('svg',{viewBox:'0 0 '+W+' '+H,role:'group','aria-label':'Map of '+nets.length+' architectures'});
    var words=find.value.trim().toLowerCase(),taken=[];
    function near(i){return order(map,i).slice(0,5)}
    if(chosen>=0&&points[chosen])near(chosen).forEach(function(j){if(points[j])svg.appendChild(el('line',{'class':'link',
      x1:X(points[chosen]),y1:Y(points[chosen]),x2:X(points[j]),y2:Y(points[j])}))});
    var sequence=nets.map(function(_,i){return i}).sort(function(a,b){return (b===chosen)-(a===chosen)});
    sequence.forEach(function(i){var p=points[i],n=nets[i];if(!p)return;
      var hit=!words||n.name.toLowerCase().indexOf(words)>=0;
      var mark=shape(n.kind,X(p),Y(p),n.placed?10:7);mark.setAttribute('fill',n.placed?'none':colour(n));
      mark.setAttribute('class','point'+(i===chosen?' chosen':'')+(hit?'':' faint'));
      if(n.placed){mark.setAttribute('style','stroke:var(--ink);stroke-width:3')}
      mark.setAttribute('tabindex','0');mark.setAttribute('role','button');mark.setAttribute('aria-label',n.name+', '+n.family+', '+n.kind);
      mark.appendChild(el('title',{},n.name+' ('+n.family+', '+n.kind+')'));
      mark.addEventListener('click',function(){choose(i)});
      mark.addEventListener('keydown',function(e){if(e.key==='Enter'||e.key===' '){e.preventDefault();choose(i)}});
      svg.appendChild(mark);
      // a name where there is room for it: right, left, above or below the point, else only on hover
      var text=n.name.replace(/^(timm|torchvision|hf):/,''),w=6.3*text.length,spots=[[11,4],[-11-w,4],[-w/2,-12],[-w/2,21]];
      if(!hit&&i!==chosen)return;
      for(var k=0;k<4;k++){var b=[X(p)+spots[k][0],Y(p)+spots[k][1]-10,w,13];
        if(b[0]<2||b[0]+w>W-2||b[1]<(W<600?110:60))continue;
        if(taken.some(function(t){return b[0]<t[0]+t[2]&&t[0]<b[0]+b[2]&&b[1]<t[1]+t[3]&&t[1]<b[1]+b[3]}))continue;
        if(points.some(function(q,j){return q&&j!==i&&X(q)>b[0]-6&&X(q)<b[0]+w+6&&Y(q)>b[1]-5&&Y(q)<b[1]+18}))continue;
        taken.push(b);svg.appendChild(el('text',{x:b[0],y:b[1]+10},text));break}
    });
    var legend=el('g',{'class':'legend','aria-hidden':'true'}),x=14,row=18;
    families.forEach(function(f,i){if(x+20+7*f.length>W){x=14;row+=20}legend.appendChild(el('circle',{cx:x,cy:row,r:6,fill:f==='yours'?'none':'var(--c'+i%7+')',stroke:f==='yours'?'var(--ink)':'none'}));
      legend.appendChild(el('text',{x:x+11,y:row+4},f));x+=28+7*f.length});x=14;row+=22;
    kinds.forEach(function(kind){if(x+20+7*kind.length>W){x=14;row+=20}var m=shape(kind,x,row,5.5);m.setAttribute('fill','var(--soft)');legend.appendChild(m);
      legend.appendChild(el('text',{x:x+11,y:row+4},kind));x+=28+7*kind.length});
    svg.appendChild(legend);
    svg.appendChild(el('line',{x1:W-PAD-s,x2:W-PAD,y1:H-16,y2:H-16,stroke:'var(--soft)','stroke-width':2}));
    svg.appendChild(el('text',{x:W-PAD-s,y:H-22},'distance 1'));
    box.replaceChildren(svg);
    var missing=nets.length-seen.length;
    document.getElementById('reading').textContent='Distance: '+map.what+'. The typical distance of two networks is 1.'+
      (missing?' '+missing+' networks have no such aspect.':'');
    describe(map)}
  function order(map,i){return nets.map(function(_,j){return j}).filter(function(j){return j!==i&&map.distances[i][j]!==null})
    .sort(function(a,b){return map.distances[i][a]-map.distances[i][b]})}
  function describe(map){var box=document.getElementById('near');box.replaceChildren();if(chosen<0){
      var hint=document.createElement('p');hint.textContent='No network is chosen.';hint.className='note';box.appendChild(hint);return}
    var n=nets[chosen],h=document.createElement('h3');h.textContent=n.name;box.appendChild(h);
    var list=document.createElement('ol'),close=order(map,chosen).slice(0,6);
    close.forEach(function(j){var li=document.createElement('li'),b=document.createElement('button');b.type='button';
      b.textContent=nets[j].name;b.addEventListener('click',function(){choose(j)});li.appendChild(b);
      li.appendChild(document.createTextNode(' '+map.distances[chosen][j].toFixed(2)));list.appendChild(li)});
    var p=document.createElement('p');p.className='note';
    p.textContent='Nearest, with distances; two measurements of this network are '+n.noise+' apart.';
    box.append(p,list);
    box.appendChild(curves(n,close.length?nets[close[0]]:null,'learning','Learns: share of the kernel by harmonic',0));
    box.appendChild(curves(n,close.length?nets[close[0]]:null,'function','Fresh networks: share of power by harmonic',1))}
  function curves(a,b,key,title,from){var w=340,h=170,svg=el('svg',{viewBox:'0 0 '+w+' '+h,role:'img','aria-label':title+' of '+a.name+(b?' and '+b.name:'')});
    var low=-6,x=function(i){return 34+(w-44)*i/16},y=function(v){return 24+(h-50)*Math.min(1,-Math.max(low,Math.log10(Math.max(v,1e-9)))/-low)};
    svg.appendChild(el('text',{x:4,y:12},title));
    [0,-2,-4,-6].forEach(function(d){var at=y(Math.pow(10,d));svg.appendChild(el('line',{x1:34,x2:w-10,y1:at,y2:at,stroke:'var(--line)'}));
      svg.appendChild(el('text',{x:2,y:at+4},d===0?'1':'1e'+d))});
    [0,4,8,12,16].forEach(function(i){svg.appendChild(el('text',{x:x(i)-4,y:h-12},i))});
    svg.appendChild(el('text',{x:w-58,y:h-1},'harmonic'));
    [[b,'var(--soft)','4 3'],[a,'var(--accent)','']].forEach(function(c){if(!c[0])return;
      svg.appendChild(el('polyline',{fill:'none',stroke:c[1],'stroke-width':2,'stroke-dasharray':c[2],
        points:c[0][key].map(function(v,i){return i<from?'':x(i)+','+y(v)}).join(' ')}))});
    return svg}
  function choose(i){chosen=i;draw()}
  select.addEventListener('change',draw);find.addEventListener('input',draw);
  window.addEventListener('resize',draw);draw();
  var table=document.getElementById('networks');
  Array.prototype.forEach.call(table.tHead.rows[0].cells,function(cell,i){cell.firstChild.addEventListener('click',function(){
    var down=cell.getAttribute('aria-sort')==='ascending',rows=Array.prototype.slice.call(table.tBodies[0].rows);
    function value(r){var v=r.cells[i].dataset.value;return i>2?(v===''?-Infinity:+v):v.toLowerCase()}
    rows.sort(function(a,b){var u=value(a),v=value(b);return (u<v?-1:u>v?1:0)*(down?-1:1)});
    Array.prototype.forEach.call(table.tHead.rows[0].cells,function(c){c.setAttribute('aria-sort','none')});
    cell.setAttribute('aria-sort',down?'descending':'ascending');rows.forEach(function(r){table.tBodies[0].appendChild(r)})})});
})();
